# The library penstock_protos: messages, stubs and service config of the public API, and the messages of error details.

set(PENSTOCK_PROTOS "${CMAKE_CURRENT_LIST_DIR}/../../../../protos" CACHE PATH "Folder of Penstock's contracts")
set(PENSTOCK_DESCRIPTORS "" CACHE FILEPATH "A descriptor set of a release, to be taken instead of the files in that folder")

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)

get_filename_component(contracts "${PENSTOCK_PROTOS}" ABSOLUTE)
set(generated "${CMAKE_CURRENT_BINARY_DIR}/generated")
file(MAKE_DIRECTORY "${generated}")
add_library(penstock_protos STATIC)

# Generates code from a file below a folder, or in the descriptor set.
function(penstock_generate folder file)
  string(REGEX REPLACE "\\.proto$" "" stem "${generated}/${file}")
  set(outputs ${stem}.pb.cc ${stem}.pb.h)
  set(flags --cpp_out=${generated})
  if(file MATCHES "/service\\.proto$")
    list(APPEND outputs ${stem}.grpc.pb.cc ${stem}.grpc.pb.h)
    list(APPEND flags --grpc_out=${generated} --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin>)
  endif()
  set(input -I${folder})
  set(depends ${folder}/${file})
  if(PENSTOCK_DESCRIPTORS AND file MATCHES "^penstock/")
    set(input --descriptor_set_in=${PENSTOCK_DESCRIPTORS})
    set(depends ${PENSTOCK_DESCRIPTORS})
  endif()
  add_custom_command(
    OUTPUT ${outputs}
    COMMAND protobuf::protoc ${input} ${flags} ${file}
    DEPENDS ${depends}
    COMMENT "Generating from ${file}"
    VERBATIM)
  target_sources(penstock_protos PRIVATE ${outputs})
endfunction()

file(GLOB files CONFIGURE_DEPENDS RELATIVE "${contracts}"
  "${contracts}/penstock/common/v1/*.proto" "${contracts}/penstock/inference/v1/*.proto")
foreach(file IN LISTS files)
  penstock_generate("${contracts}" ${file})
endforeach()
penstock_generate("${CMAKE_CURRENT_LIST_DIR}/../protos" error_details.proto)

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${contracts}/service_config.json")
file(READ "${contracts}/service_config.json" service_config)
configure_file("${CMAKE_CURRENT_LIST_DIR}/service_config.h.in" "${generated}/penstock/service_config.h" @ONLY)

target_include_directories(penstock_protos SYSTEM PUBLIC "${generated}")
target_link_libraries(penstock_protos PUBLIC gRPC::grpc++ protobuf::libprotobuf Threads::Threads)
